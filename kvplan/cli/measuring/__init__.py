"""What `kvplan bench` and `kvplan tune` measure with: two engines, and plain calls beside them."""
