"""The lab: what the command ``tammes`` does, as functions."""
