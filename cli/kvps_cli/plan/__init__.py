"""Commands that plan a training before it runs."""
