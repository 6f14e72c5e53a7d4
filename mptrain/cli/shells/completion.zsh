(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_mptrain_completion() {
    local line word about
    local -a whole whole_shown open open_shown
    for line in "${(@f)$(${~${(Q)words[1]}} completion query zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
        [[ -n $line ]] || continue
        word=${line%%$'\t'*} about=${line#*$'\t'}
        [[ -n $about ]] && about="$word  -- $about" || about=$word
        (( COLUMNS > 20 )) && about=${about[1,COLUMNS-1]}
        if [[ $word == *[=./,] ]]; then
            open+=("$word") open_shown+=("$about")
        else
            whole+=("$word") whole_shown+=("$about")
        fi
    done
    (( $#whole )) && compadd -l -d whole_shown -a whole
    (( $#open )) && compadd -S '' -l -d open_shown -a open
}
compdef _mptrain_completion mptrain
