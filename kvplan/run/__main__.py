"""`python -m kvplan.run`: the program that follows, with kvplan's `llm_datadist`.

The launcher becomes the plain interpreter (exec) with the folder `path/` first in PYTHONPATH, from
which the program and the Python processes that it starts import our `llm_datadist`. Arguments, exit
status, tracebacks and signals are then the interpreter's own.
"""

from kvplan.run.launcher import main

if __name__ == "__main__":
    main()
