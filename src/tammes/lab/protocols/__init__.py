"""How trained models are judged."""
