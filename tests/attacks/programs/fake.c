/* A program that poses as Python with torch, for tests/attacks/injection.py.

       fake MODE LIBTORCH [VICTIM MICROSECONDS]

   It exports the functions that an attach looks for, and its own mmap: its file is called libc-python3.11, so that it
   is taken for the C library too. Then it does one of these:
       asked    maps the mailbox at REGION because its mmap says so, claims it and becomes VICTIM
       steered  leaves the kernel no other place than REGION for a mapping, claims the mailbox and becomes VICTIM
       inside   becomes VICTIM inside the function that hookd calls, while a child sends signals to it
       aside    becomes VICTIM by another thread while hookd waits for that function
       spin     makes system calls inside the function that hookd calls for as long as it is traced
       compute  computes for ever inside the function that hookd calls
       refuse   says that Python is not there yet, which ends an attach at once
       late     takes longer than hookd waits for that function, then reads a line and ends with 0
       chatty   makes more system calls in it than hookd waits for, then the same
   MICROSECONDS pass between the claim and exec; -1: it waits for the data first. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define END 0x7ffffffff000UL
enum { LENGTH = 16, RAN = 64, CLAIMED = 72, CODE = 128 };

static const char *mode;
static char **victim;
static volatile uint64_t queued;
static volatile int is_called;
unsigned long Py_Version = 0x030b0000;

/* What an attach looks for in a C library: how it ends a signal handler, and a system call that returns. */
__asm__(".globl restore\nrestore: mov $15, %rax\n syscall\n.globl plain\nplain: syscall\n ret\n");

static long call(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	long result;
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}

static void become_victim(void)
{
	call(SYS_execve, (long)victim[0], (long)victim, (long)(char *[]){NULL}, 0, 0, 0);
	call(SYS_exit_group, 4, 0, 0, 0, 0, 0);
}

/* Not when it is left alone: what it takes then is its own time, for which it needs no hookd. */
static void spin(void)
{
	char text[4096] = "";
	struct timespec pause = {0, 10000000};
	for (int i = 0; i < 1000; i++)
		call(SYS_getppid, 0, 0, 0, 0, 0, 0);
	int fd = open("/proc/self/status", O_RDONLY);
	read(fd, text, sizeof text - 1);
	close(fd);
	if (strstr(text, "TracerPid:\t0"))
		nanosleep(&pause, NULL);
}

static void take_s(int seconds)
{
	struct timespec now, from;
	clock_gettime(CLOCK_MONOTONIC, &from);
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while (now.tv_sec - from.tv_sec < seconds);
}

int Py_IsInitialized(void)
{
	is_called = 1;
	if (!strcmp(mode, "late"))
		take_s(3);
	for (int i = 0; i < 5000 && !strcmp(mode, "chatty"); i++)
		call(SYS_getppid, 0, 0, 0, 0, 0, 0);
	if (!strcmp(mode, "inside"))
		become_victim();
	while (!strcmp(mode, "spin"))
		spin();
	while (!strcmp(mode, "compute") || !strcmp(mode, "aside"))
		;
	return strcmp(mode, "refuse") != 0;
}
int PyGILState_Check(void) { return 0; }
int PyGILState_Ensure(void) { return 0; }
void PyGILState_Release(int unlocked) { (void)unlocked; }
int PyRun_SimpleString(const char *text) { (void)text; return 0; }
int Py_AddPendingCall(int (*function)(void *), void *argument)
{
	(void)function;
	queued = (uint64_t)argument;
	return 0;
}
void *mmap(void *address, size_t size, int access, int flags, int fd, off_t offset)
{
	if (!strcmp(mode, "asked"))
		return (void *)call(SYS_mmap, REGION, size, access, flags | 0x10, fd, offset);
	return (void *)call(SYS_mmap, (long)address, size, access, flags, fd, offset);
}
int munmap(void *address, size_t size) { return call(SYS_munmap, (long)address, size, 0, 0, 0, 0); }

/* The registers of this loop are put back when hookd lets go: VICTIM has code of its own at this address. */
__attribute__((section(".loop"), noinline)) static void wait_for_call(void)
{
	while (!queued)
		;
}

/* Leave no gap in the address space but REGION. */
static void fill(void)
{
	static struct { uint64_t start, end; } taken[4096];
	uint64_t at = PAGE * 16;
	char line[512];
	int count = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx", &taken[count].start, &taken[count].end) == 2)
			count++;
	fclose(maps);
	taken[count].start = taken[count].end = END;
	for (int i = 0, done = 0; i <= count; i++) {
		if (!done && taken[i].start >= REGION + SIZE) {
			call(SYS_mmap, at, REGION - at, 0, 0x4032, -1, 0);
			at = REGION + SIZE;
			done = 1;
		}
		if (taken[i].start > at && taken[i].start <= END)
			call(SYS_mmap, at, taken[i].start - at, 0, 0x4032, -1, 0);
		at = taken[i].end;
	}
}

static void trouble(pid_t pid)
{
	struct timespec pause = {0, 20000000};
	for (int i = 0; i < 50; i++) {
		nanosleep(&pause, NULL);
		kill(pid, SIGTRAP);
	}
	_exit(0);
}

static void *become_victim_aside(void *unused)
{
	while (!is_called)
		usleep(100);
	become_victim();
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t other;
	mode = argv[1];
	int fd = open(argv[2], O_RDONLY);
	call(SYS_mmap, 0, PAGE, 1, 2, fd, 0);
	victim = argv + 3;
	long delay_us = argc > 4 ? atol(argv[4]) : 0;
	if (!strcmp(mode, "steered"))
		fill();
	write(1, "ready\n", 6);
	if (!strcmp(mode, "aside"))
		pthread_create(&other, NULL, become_victim_aside, NULL);
	if (!strcmp(mode, "inside")) {
		signal(SIGTRAP, SIG_IGN);
		pid_t parent = getpid();
		if (!fork())
			trouble(parent);
	}
	if (!strcmp(mode, "late") || !strcmp(mode, "chatty")) {
		char line[1];
		return read(0, line, 1) != 1 || !is_called;
	}
	while (!strcmp(mode, "spin") || !strcmp(mode, "compute") || !strcmp(mode, "refuse"))
		pause();
	wait_for_call();
	volatile uint64_t *box = (volatile uint64_t *)(queued - CODE);
	box[CLAIMED / 8] = 1;
	box[RAN / 8] = 1;
	struct timespec now, from;
	clock_gettime(CLOCK_MONOTONIC, &from);
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while (delay_us < 0 ? !box[LENGTH / 8]
			    : (now.tv_sec - from.tv_sec) * 1000000 + (now.tv_nsec - from.tv_nsec) / 1000 < delay_us);
	become_victim();
}
