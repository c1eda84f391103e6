"""Language models of experiments: loaded, trained, read through compressed caches, advised and talked to."""
