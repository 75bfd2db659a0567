"""sdpa inside other libraries: one module for each, importable where its library is installed."""
