"""Run folders: plain files, written atomically."""
