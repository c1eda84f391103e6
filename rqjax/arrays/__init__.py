"""What is done to arrays: planes, packing, norms, levels, k-means, Viterbi. No quantizer."""
