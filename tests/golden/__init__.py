"""Golden records: small runs of everything, kept as text, that prove that a change of the code has moved no number.

    python -m tests.golden list                      # the runs, what each covers, and which pairs of settings none has
    python -m tests.golden make BEFORE               # trains all of them, two at a time, and keeps their numbers in BEFORE
    python -m tests.golden compare BEFORE AFTER      # exit 0 where all is equal, else each difference, and exit 1

Make both folders on one machine with one torch: numbers depend on the CPU, so no record is committed. The usual way is
``make`` before a change and ``make`` behind it. ``make DIR --tree PATH`` trains with the package of another checkout, so
that the commit before can still be run afterwards, as long as it understands the words in `runs`. ``--runs 200`` has more
pairs, ``--only '*-gan-*'`` makes some of the runs again.

`choice` draws the runs so that they have as many pairs of settings as so many runs can have. `runs` says what a setting is
in words of the command line, trains a run as a user does, breaks one off and resumes it. `kept` reads what stays of a
run. `comparison` compares two folders. `renamed` is the table of words that have changed since.

A run is interrupted behind its first checkpoint and resumed, by SIGKILL or by SIGTERM; ``make`` fails where the result is
not that of the uninterrupted run. The record of a run that failed has its exit code alone, and equals no other.

Records hold every weight, average, optimizer state and scaler state of the last checkpoint as a digest. Where the network
computes in half precision, the weights there are the master weights. Their rounded copies show in the losses of the next
step and in the metrics of the last evaluation.
"""
