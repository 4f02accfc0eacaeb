"""The parts of `zero-bubble playground`: the page, and the Python that answers it in the browser."""
