function __mptrain_completion
    set -l words (commandline -opc)
    set -l program (string replace -r '^~/' $HOME/ -- $words[1])
    $program completion query fish $words[2..] -- (commandline -ct) 2>/dev/null
end
complete -c mptrain -f -a '(__mptrain_completion)'
