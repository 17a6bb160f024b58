/*
 * Loaded into QEMU by the linker (LD_PRELOAD) where Linux swaps its guest: all of QEMU's memory is
 * locked but for the guest's. So the limit of the control group takes memory from the guest alone, as
 * Ebb's limit does.
 *
 * EBB_BENCH_RAM_BYTES: the guest's memory is the mapping of this length.
 * EBB_BENCH_SMALL_PAGES: if it is set, the guest's memory gets no huge pages.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static size_t ram_bytes;
static int small_pages;

__attribute__((constructor)) static void pin(void)
{
	const char *bytes = getenv("EBB_BENCH_RAM_BYTES");

	ram_bytes = bytes ? strtoull(bytes, NULL, 10) : 0;
	small_pages = getenv("EBB_BENCH_SMALL_PAGES") != NULL;
	if (mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT)) {
		perror("mlockall");
		_exit(1);
	}
}

void *mmap64(void *address, size_t length, int protection, int flags, int file, off64_t offset)
{
	long made = syscall(SYS_mmap, address, length, protection, flags, file, offset);

	if (made != -1 && ram_bytes && length == ram_bytes)
		munlock((void *)made, length);
	return (void *)made;
}

void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset)
{
	return mmap64(address, length, protection, flags, file, offset);
}

int madvise(void *address, size_t length, int advice)
{
	if (small_pages && advice == MADV_HUGEPAGE && length == ram_bytes)
		return 0;
	return (int)syscall(SYS_madvise, address, length, advice);
}
