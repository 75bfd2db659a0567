"""sdpa inside other libraries: one module for each, which needs that library to be installed."""
