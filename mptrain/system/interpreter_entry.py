"""Entry script of the interpreters that `mptrain.system.interpreter` starts; never imported.

``python interpreter_entry.py SYS_PATH [-u] (-c CODE | -m MODULE) ...`` sets ``sys.path`` and runs the code or module.
"""

import sys  # built in; nothing else may be imported before the next line

sys.path[:] = eval(sys.argv.pop(1))

from mptrain.system.interpreter import guard_multiprocessing  # noqa: E402

guard_multiprocessing()
while (_word := sys.argv.pop(1)) not in ("-c", "-m"):
    pass
_what = sys.argv.pop(1)
if _word == "-c":
    exec(_what)
else:
    import runpy

    runpy.run_module(_what, run_name="__main__", alter_sys=True)
