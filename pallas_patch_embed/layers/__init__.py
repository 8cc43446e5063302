"""What an encoder is made of besides the patch embedding."""
