_mptrain_completion() {
    mapfile -t COMPREPLY < <("${1/#~\//$HOME/}" completion query bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    [[ ${COMPREPLY[0]-} == *[=./,] ]] && compopt -o nospace
    return 0
}
complete -F _mptrain_completion mptrain
