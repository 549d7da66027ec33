"""What torch knows of the operators beside their kernels: schemas, fake kernels, derivatives, autocast and vmap."""
