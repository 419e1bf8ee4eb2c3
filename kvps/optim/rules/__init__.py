"""The rules by which weights step, a module each: PyTorch's names, defaults and formulas."""
