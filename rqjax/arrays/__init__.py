"""Array functions without quantizers: planes, packing, norms, levels, k-means, Viterbi."""
