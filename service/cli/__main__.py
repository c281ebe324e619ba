"""`python -m service.cli`: the command line without its script."""

from service.memory import importing

with importing():
    from service.cli.main import main

main()
