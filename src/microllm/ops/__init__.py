"""Operators: a contract, a plain-torch reference, and faster levels where they exist."""
