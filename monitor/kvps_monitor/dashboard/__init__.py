"""`kvps dashboard`: the jobs of a server as pages that live in a browser. It only reads."""
