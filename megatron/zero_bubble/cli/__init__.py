"""The installed command `zero-bubble` and its subcommands. No other part of the package imports `cli`."""
