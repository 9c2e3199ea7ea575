# Sourced: MPIRUN with what this machine needs (root allowed where we are root, more ranks than cores allowed).
MPIRUN="mpirun --oversubscribe"
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
