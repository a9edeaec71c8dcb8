"""The tiers: folders (or files) of attention code with one face: NAME, unsupported, forward, backward."""
