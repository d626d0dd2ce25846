"""Sources of images: folders, parquet files, the Hugging Face hub, scikit-learn's digits."""

from tammes.lab.data.sources.loading import load

__all__ = ["load"]
