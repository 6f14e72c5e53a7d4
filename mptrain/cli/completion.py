"""``mptrain completion SHELL``: prints the script that makes a shell complete our command lines.

The scripts ask ``mptrain completion query SHELL ...`` on every TAB; that must answer in a tenth of a second, so
nothing here, and nothing it imports, imports torch or Hydra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mptrain.errors import EXIT_OK, UsageError, did_you_mean

if TYPE_CHECKING:
    from mptrain.cli.completion_overrides import Candidate

_BASH = r"""_mptrain_completion() {
    mapfile -t COMPREPLY < <("${1/#~\//$HOME/}" completion query bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    [[ ${COMPREPLY[0]-} == *[=./,] ]] && compopt -o nospace
    return 0
}
complete -F _mptrain_completion mptrain
"""

_ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
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
"""

_FISH = r"""function __mptrain_completion
    set -l words (commandline -opc)
    set -l program (string replace -r '^~/' $HOME/ -- $words[1])
    $program completion query fish $words[2..] -- (commandline -ct) 2>/dev/null
end
complete -c mptrain -f -a '(__mptrain_completion)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(words: Sequence[str]) -> int:
    """Prints a shell's script, or, for ``query SHELL ...``, what could stand at the end of a command line.

    Args:
        words: ``bash``, ``zsh`` or ``fish``; or a query. Its further words are, for bash, the line up to the cursor and
            the characters at which readline begins a new word; for zsh and fish, the words before the cursor.

    Raises:
        UsageError: No such shell.
    """
    if words[:1] == ["query"] and len(words) > 1 and words[1] in _QUERIES:
        print("".join(line + "\n" for line in _QUERIES[words[1]](words[2:])), end="")
        return EXIT_OK
    if len(words) != 1 or words[0] not in SCRIPTS:
        what = f"there is no completion for '{' '.join(words)}'" if words else "completion needs the name of a shell"
        guess = did_you_mean(words[0], SCRIPTS) if words else ""
        raise UsageError(what, f"did you mean {guess}?" if guess else f"there is {', '.join(SCRIPTS)}")
    print(SCRIPTS[words[0]], end="")
    return EXIT_OK


def _for_bash(words: Sequence[str]) -> list[str]:
    """Readline replaces only what stands behind the last ``=`` or ``:``, so candidates come without what is before."""
    from mptrain.cli.completion_answers import answers
    from mptrain.cli.completion_line import escaped, split

    line = split(words[0], words[1])
    fitting = [found.text for found in answers(line.words[1:], line.current)]
    return [escaped(text[line.kept :], line.quote) for text in fitting]


def _with_descriptions(words: Sequence[str]) -> list[str]:
    from mptrain.cli.completion_answers import answers

    *before, current = words
    return [_line(found) for found in answers(before, current)]


def _for_fish(words: Sequence[str]) -> list[str]:
    """Behind the last ``--`` stands the current word with its quotes, or nothing where there is none."""
    from mptrain.cli.completion_line import split

    place = len(words) - 1 - list(reversed(words)).index("--")
    current = split("".join(words[place + 1 :]), "").current
    return _with_descriptions([*words[:place], current])


def _line(found: Candidate) -> str:
    return f"{found.text}\t{found.about}"


_QUERIES: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "bash": _for_bash,
    "zsh": _with_descriptions,
    "fish": _for_fish,
}
