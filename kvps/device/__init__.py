"""The only package that knows CuPy."""
