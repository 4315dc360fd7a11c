"""`python -m localtrace` is the command line."""

from localtrace.cli import main

if __name__ == "__main__":
    main(prog_name="localtrace")
