"""A HIP runtime for tests, over the emulator: see `library`."""
