"""Sources of images: folders, parquet files, the Hugging Face hub, scikit-learn's digits."""
