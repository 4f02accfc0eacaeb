"""The parts of `zero-bubble playground`: the page, and the Python code that answers its requests in the browser."""
