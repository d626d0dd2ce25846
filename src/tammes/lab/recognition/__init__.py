"""Recognition of identities: retrieval, verification and open sets, of a run or of files."""
