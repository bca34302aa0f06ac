"""`python -m pdserve.cli`, the same as the `pdserve` command."""

from pdserve.cli.main import main

main()
