"""Reference speculative decoding, written to be read and compared with: chain and tree."""
