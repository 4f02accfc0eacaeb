"""The installed command `zero-bubble` and its subcommands. Nothing else of the package imports it."""
