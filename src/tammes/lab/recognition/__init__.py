"""Recognition of identities, of a run or of files: retrieval, verification and open-set search."""
