"""Read and write files of torch.save without running code of their pickles."""
