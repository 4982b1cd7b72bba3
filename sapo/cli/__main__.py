"""`python -m sapo.cli`: the command line without its script."""

from sapo.cli import main

main()
