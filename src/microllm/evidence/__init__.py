"""Evidence: trace, compare, time in pairs, judge by a stated rule, keep a receipt."""
