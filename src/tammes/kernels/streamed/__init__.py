"""The streamed kernel: splits and losses block by block, without an N x C matrix."""
