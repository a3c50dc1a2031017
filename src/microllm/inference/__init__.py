"""Generation: prompts in, text out."""
