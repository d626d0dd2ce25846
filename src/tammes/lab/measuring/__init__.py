"""What ``tammes measure`` reads and computes."""
