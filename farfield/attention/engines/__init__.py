"""Ways to compute the same softmax attention; each says in its docstring what it serves."""
