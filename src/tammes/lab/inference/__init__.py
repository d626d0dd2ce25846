"""Use trained models: embeddings, predictions, export."""
