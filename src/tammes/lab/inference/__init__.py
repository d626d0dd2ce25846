"""Use of trained models: embeddings, predictions, export."""
