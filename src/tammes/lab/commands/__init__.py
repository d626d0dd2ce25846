"""What the command ``tammes`` does: a module for each of its words."""
