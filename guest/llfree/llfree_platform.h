/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * What the allocator needs of its surroundings: integers, and atomic words.
 * Who reads a word's change sees what was done before it; llf_peek() reads
 * what may be old.
 */
#ifndef LLFREE_PLATFORM_H
#define LLFREE_PLATFORM_H

#ifdef __KERNEL__

#include <linux/atomic.h>
#include <linux/bitops.h>
#include <linux/build_bug.h>
#include <linux/compiler.h>
#include <linux/types.h>

#define llf_u16 u16
#define llf_u32 u32
#define llf_u64 u64

#define llf_load(word) smp_load_acquire(word)
#define llf_peek(word) READ_ONCE(*(word))
#define llf_store(word, value) smp_store_release(word, value)
/* *old becomes what the word is instead, if it is something else. */
#define llf_replace(word, old, next) try_cmpxchg(word, old, next)

#define llf_first_set(bits) __ffs64(bits)
#define llf_count_set(bits) hweight64(bits)

#else

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

#define llf_u16 _Atomic(u16)
#define llf_u32 _Atomic(u32)
#define llf_u64 _Atomic(u64)

#define llf_load(word) atomic_load_explicit(word, memory_order_acquire)
#define llf_peek(word) atomic_load_explicit(word, memory_order_relaxed)
#define llf_store(word, value) atomic_store_explicit(word, value, memory_order_release)
/* *old becomes what the word is instead, if it is something else. */
#define llf_replace(word, old, next)                                           \
	atomic_compare_exchange_strong_explicit(word, old, next, memory_order_acq_rel, \
						memory_order_acquire)

#define llf_first_set(bits) ((unsigned int)__builtin_ctzll(bits))
#define llf_count_set(bits) ((unsigned int)__builtin_popcountll(bits))

#ifndef likely
#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)
#endif
#ifndef noinline
#define noinline __attribute__((__noinline__))
#endif
#ifndef __always_inline
#define __always_inline inline __attribute__((__always_inline__))
#endif

#endif /* __KERNEL__ */
#endif /* LLFREE_PLATFORM_H */
