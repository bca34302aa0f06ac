"""The `pdserve` command."""
