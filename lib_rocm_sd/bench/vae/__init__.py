"""`bench vae`: a VAE's decoder and encoder in every way that a host may run them."""
