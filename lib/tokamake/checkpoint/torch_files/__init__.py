"""Files of torch.save, read and written without running a pickle."""
