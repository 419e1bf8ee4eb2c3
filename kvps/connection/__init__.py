"""How Redis is talked to."""
