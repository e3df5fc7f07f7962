"""REST: routes by resource, their schemas, and who may use them."""
