"""`python -m service.cli`: the command line without its script."""

from service.cli.main import main

main()
